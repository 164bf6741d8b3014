"""Recovery from the loss of a majority: survivors' reports, a plan, and the recovered directory."""
