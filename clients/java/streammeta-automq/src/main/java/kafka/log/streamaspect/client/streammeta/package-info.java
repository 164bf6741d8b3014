/** The name under which AutoMQ's brokers find the plug-in. */
package kafka.log.streamaspect.client.streammeta;
