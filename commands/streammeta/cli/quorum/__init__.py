"""Commands about controllers and their quorum."""
