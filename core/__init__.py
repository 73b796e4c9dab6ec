"""Layer 0: the nouns and codecs that all of Tandem shares. Imports no other package of Tandem."""
