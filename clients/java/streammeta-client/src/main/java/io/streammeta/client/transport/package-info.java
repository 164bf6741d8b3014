/**
 * Calls to the controllers: connections, search for the leader, retries and deadlines. Internal, because it uses types
 * of gRPC.
 */
package io.streammeta.client.transport;
