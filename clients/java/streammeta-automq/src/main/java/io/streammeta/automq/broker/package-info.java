/** The parts of the plug-in that need a whole AutoMQ broker. */
package io.streammeta.automq.broker;
