package io.streammeta.kafka;

import io.streammeta.client.StreammetaClient;
import io.streammeta.client.TlsFiles;
import java.nio.file.Path;
import java.util.Map;
import org.apache.kafka.common.config.AbstractConfig;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.config.ConfigDef.Importance;
import org.apache.kafka.common.config.ConfigDef.Type;
import org.apache.kafka.common.config.ConfigException;

/** Options of both plug-ins, after Kafka has removed their prefix. */
class PluginConfig extends AbstractConfig {
    static final String ENDPOINTS = "endpoints";
    static final String NAMESPACE = "namespace";
    static final String TLS_CA = "tls.ca";
    static final String TLS_CERTIFICATE = "tls.certificate";
    static final String TLS_KEY = "tls.key";

    PluginConfig(Map<String, ?> options) {
        this(definition(), options);
    }

    PluginConfig(ConfigDef definition, Map<String, ?> options) {
        super(definition, options, false);
    }

    static ConfigDef definition() {
        return new ConfigDef()
                .define(ENDPOINTS, Type.LIST, Importance.HIGH, "controllers, each as HOST:PORT")
                .define(NAMESPACE, Type.STRING, "kafka-tiered", Importance.MEDIUM, "namespace of the segments' keys")
                .define(TLS_CA, Type.STRING, null, Importance.MEDIUM, "file with the authorities of the controllers")
                .define(TLS_CERTIFICATE, Type.STRING, null, Importance.MEDIUM, "file with the broker's certificate")
                .define(TLS_KEY, Type.STRING, null, Importance.MEDIUM, "file with the private key of the certificate");
    }

    String namespace() {
        return getString(NAMESPACE);
    }

    /** Returns a client, which connects on its first call. */
    StreammetaClient newClient() {
        StreammetaClient.Builder builder = StreammetaClient.builder().endpoints(getList(ENDPOINTS));
        String ca = getString(TLS_CA);
        String certificate = getString(TLS_CERTIFICATE);
        String key = getString(TLS_KEY);
        if (ca != null && certificate != null && key != null) {
            builder.tls(new TlsFiles(Path.of(ca), Path.of(certificate), Path.of(key)));
        } else if (ca != null || certificate != null || key != null) {
            throw new ConfigException("set all of " + TLS_CA + ", " + TLS_CERTIFICATE + " and " + TLS_KEY + ", or none");
        }
        return builder.build();
    }
}
