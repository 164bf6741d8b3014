package org.apache.kafka.tiered.storage;

import io.streammeta.testkit.Controllers;
import java.util.Properties;
import org.apache.kafka.tiered.storage.integration.DeleteSegmentsByRetentionSizeTest;
import org.apache.kafka.tiered.storage.integration.DeleteSegmentsByRetentionTimeTest;
import org.apache.kafka.tiered.storage.integration.DeleteSegmentsDueToLogStartOffsetBreachTest;
import org.apache.kafka.tiered.storage.integration.DeleteTopicTest;
import org.apache.kafka.tiered.storage.integration.EnableRemoteLogOnTopicTest;
import org.apache.kafka.tiered.storage.integration.FetchFromLeaderWithCorruptedCheckpointTest;
import org.apache.kafka.tiered.storage.integration.ListOffsetsTest;
import org.apache.kafka.tiered.storage.integration.OffloadAndConsumeFromLeaderTest;
import org.apache.kafka.tiered.storage.integration.OffloadAndTxnConsumeFromLeaderTest;
import org.apache.kafka.tiered.storage.integration.RollAndOffloadActiveSegmentTest;
import org.junit.jupiter.api.Nested;
import org.junit.jupiter.api.extension.RegisterExtension;

/**
 * Kafka's own tests of tiered storage, on this metadata manager. Their storage is Kafka's for tests, because they read
 * its files. The tests of reassignments are left out: they ask for Kafka's internal topic.
 */
class KafkaTieredStorageTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    /** A test of Kafka, whose class is final. It is in Kafka's package to reach its steps. */
    abstract static class Wrapper extends TieredStorageTestHarness {
        private final TieredStorageTestHarness wrapped;

        Wrapper(TieredStorageTestHarness wrapped) {
            this.wrapped = wrapped;
        }

        @Override
        public int brokerCount() {
            return wrapped.brokerCount();
        }

        @Override
        public Properties overridingProps() {
            Properties config = super.overridingProps();
            String prefix = config.getProperty("remote.log.metadata.manager.impl.prefix");
            config.setProperty(
                    "remote.log.metadata.manager.class.name",
                    "io.streammeta.kafka.StreammetaRemoteLogMetadataManager");
            config.setProperty(prefix + "endpoints", String.join(",", CONTROLLERS.endpoints()));
            return config;
        }

        @Override
        protected void writeTestSpecifications(TieredStorageTestBuilder builder) {
            wrapped.writeTestSpecifications(builder);
        }
    }

    @Nested
    class DeleteSegmentsByRetentionSize extends Wrapper {
        DeleteSegmentsByRetentionSize() {
            super(new DeleteSegmentsByRetentionSizeTest());
        }
    }

    @Nested
    class DeleteSegmentsByRetentionTime extends Wrapper {
        DeleteSegmentsByRetentionTime() {
            super(new DeleteSegmentsByRetentionTimeTest());
        }
    }

    @Nested
    class DeleteSegmentsDueToLogStartOffsetBreach extends Wrapper {
        DeleteSegmentsDueToLogStartOffsetBreach() {
            super(new DeleteSegmentsDueToLogStartOffsetBreachTest());
        }
    }

    @Nested
    class DeleteTopic extends Wrapper {
        DeleteTopic() {
            super(new DeleteTopicTest());
        }
    }

    @Nested
    class EnableRemoteLogOnTopic extends Wrapper {
        EnableRemoteLogOnTopic() {
            super(new EnableRemoteLogOnTopicTest());
        }
    }

    @Nested
    class FetchFromLeaderWithCorruptedCheckpoint extends Wrapper {
        FetchFromLeaderWithCorruptedCheckpoint() {
            super(new FetchFromLeaderWithCorruptedCheckpointTest());
        }
    }

    @Nested
    class ListOffsets extends Wrapper {
        ListOffsets() {
            super(new ListOffsetsTest());
        }
    }

    @Nested
    class OffloadAndConsumeFromLeader extends Wrapper {
        OffloadAndConsumeFromLeader() {
            super(new OffloadAndConsumeFromLeaderTest());
        }
    }

    @Nested
    class OffloadAndTxnConsumeFromLeader extends Wrapper {
        OffloadAndTxnConsumeFromLeader() {
            super(new OffloadAndTxnConsumeFromLeaderTest());
        }
    }

    @Nested
    class RollAndOffloadActiveSegment extends Wrapper {
        RollAndOffloadActiveSegment() {
            super(new RollAndOffloadActiveSegmentTest());
        }
    }
}
