"""What a step computes, and the programs that compute it."""
