package io.streammeta.kafka;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.Random;
import java.util.stream.LongStream;
import org.apache.kafka.common.Uuid;
import org.junit.jupiter.api.Test;

class EpochSegmentsTest {
    private final EpochSegments segments = new EpochSegments();

    private record Copy(long start, long end, Uuid id) {
        boolean contains(long offset) {
            return start <= offset && offset <= end;
        }
    }

    private Uuid copy(long start, long end) {
        Uuid id = Uuid.randomUuid();
        segments.add(id);
        segments.noteCopied(end);
        segments.show(start, end, id);
        return id;
    }

    @Test
    void aLongerCopyHidesShorterOnesAndBothAreListed() {
        Uuid shorter = copy(10, 90);
        Uuid longer = copy(5, 100);
        assertEquals(Optional.of(longer), segments.find(50));
        assertEquals(Optional.of(longer), segments.find(95));
        assertEquals(java.util.Set.of(shorter, longer), segments.segmentIds());
    }

    @Test
    void aLateShorterCopyHidesNothing() {
        Uuid first = copy(0, 200);
        copy(50, 60);
        copy(0, 100);
        for (long offset : new long[] {0, 55, 150, 200}) {
            assertEquals(Optional.of(first), segments.find(offset));
        }
        assertEquals(Optional.empty(), segments.find(201));
    }

    @Test
    void theHighestOffsetStaysAfterDeletion() {
        Uuid only = copy(0, 99);
        segments.remove(0, only);
        assertEquals(Optional.empty(), segments.find(10));
        assertEquals(Optional.of(99L), segments.highestOffset());
    }

    @Test
    void everyCopiedOffsetIsFoundWhateverTheOrder() {
        Random random = new Random(7);
        for (int round = 0; round < 2_000; round++) {
            EpochSegments epoch = new EpochSegments();
            List<Copy> copies = new ArrayList<>();
            for (int number = 0; number < 8; number++) {
                long start = random.nextInt(40);
                Copy copy = new Copy(start, start + random.nextInt(20), Uuid.randomUuid());
                copies.add(copy);
                epoch.show(copy.start, copy.end, copy.id);
            }
            LongStream.range(0, 65).forEach(offset -> {
                boolean isCopied = copies.stream().anyMatch(copy -> copy.contains(offset));
                Optional<Uuid> found = epoch.find(offset);
                assertEquals(isCopied, found.isPresent());
                found.ifPresent(id -> assertEquals(1, copies.stream()
                        .filter(copy -> copy.id.equals(id) && copy.contains(offset))
                        .count()));
            });
        }
    }
}
