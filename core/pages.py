"""What whoever touches pages has to know of them."""

DUMMY_PAGE = 0
"""Never allocated: padding and suppressed writes go here."""
