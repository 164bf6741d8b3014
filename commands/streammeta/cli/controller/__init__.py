"""Commands that prepare and run one controller."""
