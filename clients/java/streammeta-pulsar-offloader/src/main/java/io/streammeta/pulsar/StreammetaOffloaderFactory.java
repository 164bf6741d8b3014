package io.streammeta.pulsar;

import java.io.IOException;
import java.util.HashMap;
import java.util.Map;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.LedgerOffloaderFactory;
import org.apache.bookkeeper.mledger.LedgerOffloaderStats;
import org.apache.bookkeeper.mledger.LedgerOffloaderStatsDisable;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;

/** Makes the offloaders of a broker whose {@code managedLedgerOffloadDriver} is {@code streammeta}. */
public final class StreammetaOffloaderFactory implements LedgerOffloaderFactory<StreammetaOffloader> {
    private final Map<OffloaderSettings, Shared> clusters = new HashMap<>();
    /** Options of the broker. Pulsar loses them when it merges the policies of a namespace with the broker's. */
    private Map<String, String> brokerOptions = Map.of();

    /** A cluster and the number of its offloaders. */
    private static final class Shared {
        private final Cluster cluster;
        private int users;

        private Shared(Cluster cluster) {
            this.cluster = cluster;
        }
    }

    @Override
    public boolean isDriverSupported(String driverName) {
        return StreammetaOffloader.DRIVER.equalsIgnoreCase(driverName);
    }

    @Override
    public StreammetaOffloader create(
            OffloadPoliciesImpl policies, Map<String, String> userMetadata, OrderedScheduler scheduler)
            throws IOException {
        return create(policies, userMetadata, scheduler, LedgerOffloaderStatsDisable.INSTANCE);
    }

    @Override
    public synchronized StreammetaOffloader create(
            OffloadPoliciesImpl policies,
            Map<String, String> userMetadata,
            OrderedScheduler scheduler,
            LedgerOffloaderStats stats)
            throws IOException {
        Map<String, String> options = policies.getManagedLedgerExtraConfigurations();
        if (options != null && !options.isEmpty()) {
            brokerOptions = Map.copyOf(options);
        }
        try {
            OffloaderSettings settings = OffloaderSettings.of(brokerOptions);
            Shared shared = clusters.get(settings);
            if (shared == null) {
                shared = new Shared(connect(settings));
                clusters.put(settings, shared);
            }
            shared.users++;
            return new StreammetaOffloader(
                    shared.cluster, settings, policies, userMetadata, scheduler, stats, () -> release(settings));
        } catch (IllegalArgumentException error) {
            throw new IOException(error.getMessage(), error);
        }
    }

    private static Cluster connect(OffloaderSettings settings) throws IOException {
        ScratchFile.deleteAbandoned(settings.workDirectory());
        Thread thread = Thread.currentThread();
        ClassLoader loader = thread.getContextClassLoader();
        // Libraries of the archive look for their services in the thread's class loader, which is the broker's.
        thread.setContextClassLoader(StreammetaOffloaderFactory.class.getClassLoader());
        try {
            return new Cluster(settings);
        } finally {
            thread.setContextClassLoader(loader);
        }
    }

    private synchronized void release(OffloaderSettings settings) {
        Shared shared = clusters.get(settings);
        if (shared != null && --shared.users == 0) {
            clusters.remove(settings);
            shared.cluster.close();
        }
    }

    @Override
    public synchronized void close() {
        clusters.values().forEach(shared -> shared.cluster.close());
        clusters.clear();
    }
}
