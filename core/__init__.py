"""Layer 0: data types and codecs that all packages of Tandem share.

Imports no other package of Tandem.
"""
