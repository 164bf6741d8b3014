package io.streammeta.kafka;

import java.util.Map;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.config.ConfigDef.Importance;
import org.apache.kafka.common.config.ConfigDef.Type;

/** Options of {@link StreammetaRemoteStorageManager}. */
final class StorageConfig extends PluginConfig {
    static final String BUCKET = "bucket";
    static final String NODE_ID = "node.id";
    /** Kafka adds the broker's id to the options of a plug-in. */
    private static final String BROKER_ID = "broker.id";

    StorageConfig(Map<String, ?> options) {
        super(
                definition()
                        .define(BUCKET, Type.STRING, Importance.HIGH, "address of the cluster's bucket")
                        .define(NODE_ID, Type.INT, null, Importance.MEDIUM, "node id, the broker's own by default")
                        .define(BROKER_ID, Type.INT, -1, Importance.LOW, "id of the broker, set by Kafka"),
                options);
    }

    String bucket() {
        return getString(BUCKET);
    }

    int nodeId() {
        Integer nodeId = getInt(NODE_ID);
        return nodeId == null ? getInt(BROKER_ID) : nodeId;
    }
}
