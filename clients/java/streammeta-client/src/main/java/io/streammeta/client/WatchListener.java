package io.streammeta.client;

import io.streammeta.client.errors.StreammetaException;
import java.util.List;

/** Callbacks of a watch, one at a time and in order. A listener that blocks holds back the changes after. */
public interface WatchListener {
    /**
     * Reports the selected changes of one log entry or of several. Those with the same offset took effect together, and
     * come in one call.
     *
     * @param changes the changes, at least one
     */
    void onChanges(List<MetadataChange> changes);

    /**
     * Reports the end of the watch: {@link io.streammeta.client.errors.ChangesLostException} if the next change is
     * compacted away everywhere, {@link io.streammeta.client.errors.ControllerUnavailableException} if no controller
     * serves the watch, or a rejection.
     */
    void onEnd(StreammetaException error);
}
