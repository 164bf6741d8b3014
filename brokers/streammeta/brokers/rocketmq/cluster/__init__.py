"""RocketMQ's tiered storage on a cluster of controllers."""
