package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.ProtocolViolationException;
import io.streammeta.client.errors.Rejection;
import io.streammeta.v1.PageRequest;
import io.streammeta.v1.Tag;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.OptionalLong;
import java.util.OptionalInt;

/** Translation between the messages of the contract and the values of the client. */
final class Wire {
    private static final String PREFIX = "ERROR_CODE_";
    private static final int PAGE_SIZE = 10_000;

    private Wire() {}

    static ErrorCode code(io.streammeta.v1.ErrorCode code) {
        String name = code.name();
        try {
            return name.startsWith(PREFIX) ? ErrorCode.valueOf(name.substring(PREFIX.length())) : ErrorCode.UNKNOWN;
        } catch (IllegalArgumentException newer) {
            return ErrorCode.UNKNOWN; // a controller of a later version
        }
    }

    static List<ErrorCode> codes(List<io.streammeta.v1.ErrorCode> codes) {
        return codes.stream().map(Wire::code).toList();
    }

    /** Throws the exception of a rejected item. */
    static void check(io.streammeta.v1.ErrorCode code, String subject) {
        if (code != io.streammeta.v1.ErrorCode.ERROR_CODE_NONE) {
            throw code(code).rejection(subject);
        }
    }

    /** Throws unless an answer has as many rows as its request. */
    static void checkRows(String method, int asked, int answered) {
        if (asked != answered) {
            throw new ProtocolViolationException(new Rejection(
                    method, null, "", "the answer has " + answered + " rows, expected " + asked, Map.of()));
        }
    }

    static List<Tag> tags(Map<String, String> tags) {
        return new TreeMap<>(tags)
                .entrySet().stream()
                        .map(tag -> Tag.newBuilder()
                                .setKey(tag.getKey())
                                .setValue(tag.getValue())
                                .build())
                        .toList();
    }

    static Map<String, String> tags(List<Tag> tags) {
        Map<String, String> byKey = new TreeMap<>();
        tags.forEach(tag -> byKey.put(tag.getKey(), tag.getValue()));
        return byKey;
    }

    static PageRequest page(String token) {
        return PageRequest.newBuilder().setPageSize(PAGE_SIZE).setPageToken(token).build();
    }

    static OptionalLong optional(boolean isPresent, long value) {
        return isPresent ? OptionalLong.of(value) : OptionalLong.empty();
    }

    static OptionalInt optional(boolean isPresent, int value) {
        return isPresent ? OptionalInt.of(value) : OptionalInt.empty();
    }

    /** Returns an unsigned 32-bit checksum. */
    static OptionalLong checksum(boolean isPresent, int value) {
        return optional(isPresent, Integer.toUnsignedLong(value));
    }
}
