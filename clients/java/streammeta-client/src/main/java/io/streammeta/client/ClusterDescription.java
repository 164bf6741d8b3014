package io.streammeta.client;

import io.streammeta.v1.DescribeClusterResponse;
import java.util.List;
import java.util.OptionalInt;
import java.util.OptionalLong;

/**
 * The cluster, as one controller knows it.
 *
 * @param clusterId the name of the cluster
 * @param clusterUuid an id that was drawn once for the cluster, empty before it is agreed
 * @param leaderId the controller that leads, empty if unknown
 * @param leaderEndpoint its address for clients, empty if unknown
 * @param highWatermark the committed end of the log, empty if unknown
 * @param objectNamespace the second part of every object's key in the bucket
 * @param featureLevel the feature level of the metadata
 * @param controllers the addresses of all controllers for clients, without unknown ones
 */
public record ClusterDescription(
        String clusterId,
        String clusterUuid,
        OptionalInt leaderId,
        String leaderEndpoint,
        OptionalLong highWatermark,
        String objectNamespace,
        int featureLevel,
        List<String> controllers) {
    static ClusterDescription of(DescribeClusterResponse answer) {
        return new ClusterDescription(
                answer.getClusterId(),
                answer.getClusterUuid(),
                Wire.optional(answer.hasLeaderId(), answer.getLeaderId()),
                answer.getLeaderEndpoint(),
                Wire.optional(answer.hasHighWatermark(), answer.getHighWatermark()),
                answer.getObjectNamespace(),
                answer.getFeatureLevel(),
                answer.getControllersList().stream()
                        .map(controller -> controller.getEndpoint())
                        .filter(endpoint -> !endpoint.isEmpty())
                        .toList());
    }
}
