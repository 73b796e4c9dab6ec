"""What a step shall be: who is in it, how long, in which form. Plain Python."""
