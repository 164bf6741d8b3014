package io.streammeta.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotEquals;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.NodeEpochExpiredException;
import io.streammeta.client.errors.NodeFencedException;
import io.streammeta.client.errors.RejectedException;
import java.util.EnumSet;
import java.util.Set;
import org.junit.jupiter.api.Test;

class ErrorCodeTest {
    @Test
    void everyCodeOfTheContractHasAnExceptionOfItsOwn() {
        Set<ErrorCode> known = EnumSet.of(ErrorCode.UNKNOWN);
        for (io.streammeta.v1.ErrorCode wire : io.streammeta.v1.ErrorCode.values()) {
            if (wire != io.streammeta.v1.ErrorCode.UNRECOGNIZED) {
                assertNotEquals(ErrorCode.UNKNOWN, Wire.code(wire), wire.name());
                known.add(Wire.code(wire));
            }
        }
        assertEquals(EnumSet.allOf(ErrorCode.class), known);
    }

    @Test
    void aMessageNamesSubjectReasonAndNextStep() {
        RejectedException error = ErrorCode.STREAM_FENCED.rejection("stream 7");
        assertEquals("stream 7 was rejected with STREAM_FENCED. Next step: " + error.nextStep(), error.getMessage());
        assertEquals("stream 7", error.subject());
        assertInstanceOf(NodeFencedException.class, ErrorCode.NODE_EPOCH_EXPIRED.rejection("node 1"));
        assertInstanceOf(NodeEpochExpiredException.class, ErrorCode.NODE_EPOCH_EXPIRED.rejection("node 1"));
    }

    @Test
    void aCodeOfALaterVersionIsARejection() {
        assertEquals(ErrorCode.UNKNOWN, Wire.code(io.streammeta.v1.ErrorCode.UNRECOGNIZED));
    }
}
