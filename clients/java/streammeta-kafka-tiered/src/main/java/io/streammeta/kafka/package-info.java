/**
 * Tiered storage of stock Apache Kafka brokers: metadata of remote segments in the controllers, and segments as named
 * objects in the bucket.
 */
package io.streammeta.kafka;
