package io.streammeta.client;

/**
 * A node whose data a session has to recover.
 *
 * @param node the node and the epoch of its process, for {@link BrokerSession#streamsOf} and
 *     {@link BrokerSession#objectsOf}
 * @param walConfig where its write-ahead log is
 */
public record Recovery(NodeIdentity node, String walConfig) {}
