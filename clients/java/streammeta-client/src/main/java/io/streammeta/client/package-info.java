/**
 * Client of streammeta's controllers. {@link io.streammeta.client.StreammetaClient} is the entrance. The types of this
 * package and of {@code io.streammeta.client.errors} are the API. None of them shows a type of gRPC or Protocol Buffers,
 * which are relocated inside of the jar.
 */
package io.streammeta.client;
