package io.streammeta.automq;

import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.junit.jupiter.api.Test;

class DestroyedObjectsTest {
    @Test
    void theLastOnesAreKnownAndTheRestIsForgotten() {
        DestroyedObjects destroyed = new DestroyedObjects();
        int count = 3 * DestroyedObjects.LIMIT;
        for (long id = 0; id < count; id++) {
            destroyed.add(id);
        }
        for (long id = count - DestroyedObjects.LIMIT; id < count; id++) {
            assertTrue(destroyed.contains(id));
        }
        assertFalse(destroyed.contains(0));
        assertFalse(destroyed.contains(count));
    }
}
