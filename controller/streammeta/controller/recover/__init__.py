"""Recovery from the loss of a majority: what survivors hold, a plan, and a directory made by it."""
