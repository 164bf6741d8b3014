/**
 * Tiered storage of stock RocketMQ brokers: {@link io.streammeta.rocketmq.StreammetaMetadataStore} keeps the metadata as
 * keys of the controllers, and {@link io.streammeta.rocketmq.StreammetaFileSegment} the bytes as named objects.
 */
package io.streammeta.rocketmq;
