"""Layer 0: the few nouns and codecs every part of Tandem shares. Imports nothing else of ours."""
