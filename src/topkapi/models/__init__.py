"""Transformers' DSA models, run on Topkapi's attention; everything else stays Transformers'."""
