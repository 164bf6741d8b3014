package org.apache.kafka.controller.stream;

/** Shape of the bucket's client in a controller of Kafka. */
public class StreamClient {}
