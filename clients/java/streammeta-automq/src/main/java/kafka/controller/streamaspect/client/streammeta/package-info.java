/** The name under which the controllers of Kafka in AutoMQ find the plug-in. */
package kafka.controller.streamaspect.client.streammeta;
