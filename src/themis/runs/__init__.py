"""What a campaign leaves behind: the run, its faults, its folder, and what can be learned from them."""
