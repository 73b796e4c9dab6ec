"""Sampling: logit rules, token sampling, log probabilities and the acceptance of drafts."""
