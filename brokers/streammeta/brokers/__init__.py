"""Shapes of brokers on streammeta: logs of partitions, queues and ledgers on the broker client.

Each shape is a package of its own, with pure formats apart from I/O. Only commands import this
package.
"""
