/** A ledger offloader for stock Pulsar brokers: copies are named objects of a streammeta cluster. */
package io.streammeta.pulsar;
