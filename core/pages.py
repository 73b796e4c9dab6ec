"""Constants of KV cache pages."""

DUMMY_PAGE = 0
"""Page that is never allocated: target of padding and of suppressed writes."""
