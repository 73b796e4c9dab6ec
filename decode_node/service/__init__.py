"""What a decode rank is to others: its calls, its sessions, the frames that it sends."""
