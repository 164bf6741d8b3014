"""Broker shapes on streammeta: partition logs, queues and ledgers on top of the broker client.

Each shape is a separate package, with pure formats apart from I/O. Only commands import this
package.
"""
