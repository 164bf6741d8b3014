/**
 * Errors of the client. A message names the rejected stream, node, object or key, the reason and the next step.
 */
package io.streammeta.client.errors;
