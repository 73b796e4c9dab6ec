"""Parts that all kinds of ranks share: engine thread, token frames, actor shell, step agreement."""
