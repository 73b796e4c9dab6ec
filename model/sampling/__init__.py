"""From logits to tokens: rules, draws, log probabilities, and what verification accepts."""
