/**
 * Plug-in of AutoMQ: its streams, objects and keys are in the metadata of streammeta's controllers.
 *
 * <p>{@link io.streammeta.automq.AutomqMetadata} makes the managers that s3stream asks for. The factory that a whole
 * AutoMQ broker loads by name is in {@code kafka.log.streamaspect.client.streammeta}.
 */
package io.streammeta.automq;
