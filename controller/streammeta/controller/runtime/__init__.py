"""One thread of control: requests are decided, replicated and answered here."""
