-- Commits of shared rows on PostgreSQL: the tables, and the function that is one commit.
-- Every statement works on all rows of a commit. A stream has at most one row in a commit.

DROP TABLE IF EXISTS streams, objects, ranges, producers;

-- Room in each page keeps the new version of a row on the page of the old one, without a new index
-- entry.
CREATE TABLE streams (
    id bigint PRIMARY KEY,
    end_offset bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE objects (
    id bigint PRIMARY KEY,
    size bigint NOT NULL,
    node integer NOT NULL,
    committed_at timestamptz NOT NULL
);

CREATE TABLE ranges (
    object_id bigint NOT NULL,
    stream_id bigint NOT NULL,
    start_offset bigint NOT NULL,
    end_offset bigint NOT NULL,
    PRIMARY KEY (stream_id, start_offset)
);

-- The arrays are of the five newest batches of the epoch, the newest first.
CREATE TABLE producers (
    stream_id bigint NOT NULL,
    producer_id bigint NOT NULL,
    epoch integer NOT NULL,
    next_sequence bigint NOT NULL,
    sequences bigint[] NOT NULL,
    counts bigint[] NOT NULL,
    starts bigint[] NOT NULL,
    PRIMARY KEY (stream_id, producer_id)
) WITH (fillfactor = 50);

-- Assigns offsets to all rows or to none. `stream_ids` ascend. The last three arrays are empty
-- without producers. Errors: 0 none, 1 duplicate, 2 out of order, 3 fenced. A duplicate has the
-- start offset of its first commit; other rows have none if a row has an error.
CREATE OR REPLACE FUNCTION commit_rows(
    object_id bigint, object_size bigint, node integer,
    stream_ids bigint[], record_counts bigint[],
    producer_ids bigint[], epochs integer[], first_sequences bigint[],
    OUT start_offsets bigint[], OUT errors integer[]
) LANGUAGE plpgsql AS $$
DECLARE
    known_starts bigint[];
    updated bigint;
BEGIN
    -- Every commit locks in the order of ids, so commits never wait for each other in a circle.
    SELECT array_agg(locked.end_offset) INTO start_offsets FROM (
        SELECT s.end_offset FROM streams s WHERE s.id = ANY (stream_ids) ORDER BY s.id FOR UPDATE
    ) locked;
    IF cardinality(start_offsets) IS DISTINCT FROM cardinality(stream_ids) THEN
        RAISE EXCEPTION 'a stream is unknown, or has two rows';
    END IF;

    IF cardinality(producer_ids) > 0 THEN
        SELECT array_agg(checked.error ORDER BY checked.place),
               array_agg(CASE WHEN checked.error = 1 THEN checked.starts[checked.which] END
                         ORDER BY checked.place)
            INTO errors, known_starts
            FROM (
                SELECT judged.place, judged.starts, judged.which, CASE
                    WHEN judged.known_epoch IS NULL THEN 0
                    WHEN judged.epoch < judged.known_epoch THEN 3
                    WHEN judged.epoch > judged.known_epoch AND judged.sequence = 0 THEN 0
                    WHEN judged.epoch > judged.known_epoch THEN 2
                    WHEN judged.sequence = judged.next_sequence THEN 0
                    WHEN judged.counts[judged.which] = judged.record_count THEN 1
                    ELSE 2
                END AS error
                FROM (
                    SELECT given.*, p.epoch AS known_epoch, p.next_sequence, p.counts, p.starts,
                        CASE WHEN given.sequence <> p.next_sequence
                            THEN array_position(p.sequences, given.sequence) END AS which
                    FROM unnest(stream_ids, producer_ids, epochs, first_sequences, record_counts)
                        WITH ORDINALITY
                        AS given (stream_id, producer_id, epoch, sequence, record_count, place)
                    LEFT JOIN producers p
                        ON p.stream_id = given.stream_id AND p.producer_id = given.producer_id
                ) judged
            ) checked;
        IF 0 <> ANY (errors) THEN
            start_offsets := known_starts;
            RETURN;
        END IF;
    END IF;

    UPDATE streams s SET end_offset = s.end_offset + given.record_count
        FROM unnest(stream_ids, record_counts) AS given (stream_id, record_count)
        WHERE s.id = given.stream_id;
    INSERT INTO objects VALUES (object_id, object_size, node, now());
    INSERT INTO ranges
        SELECT commit_rows.object_id, given.stream_id, given.start, given.start + given.record_count
        FROM unnest(stream_ids, start_offsets, record_counts)
            AS given (stream_id, start, record_count);
    IF cardinality(producer_ids) = 0 THEN
        RETURN;
    END IF;

    UPDATE producers p SET
        epoch = given.epoch,
        next_sequence = (given.sequence + given.record_count) & 2147483647,
        sequences = CASE WHEN p.epoch = given.epoch
            THEN (given.sequence || p.sequences)[:5] ELSE ARRAY[given.sequence] END,
        counts = CASE WHEN p.epoch = given.epoch
            THEN (given.record_count || p.counts)[:5] ELSE ARRAY[given.record_count] END,
        starts = CASE WHEN p.epoch = given.epoch
            THEN (given.start || p.starts)[:5] ELSE ARRAY[given.start] END
        FROM unnest(stream_ids, producer_ids, epochs, first_sequences, record_counts, start_offsets)
            AS given (stream_id, producer_id, epoch, sequence, record_count, start)
        WHERE p.stream_id = given.stream_id AND p.producer_id = given.producer_id;
    GET DIAGNOSTICS updated = ROW_COUNT;
    -- The streams are locked, so no other commit adds a producer meanwhile.
    IF updated < cardinality(producer_ids) THEN
        INSERT INTO producers
            SELECT given.stream_id, given.producer_id, given.epoch,
                (given.sequence + given.record_count) & 2147483647,
                ARRAY[given.sequence], ARRAY[given.record_count], ARRAY[given.start]
            FROM unnest(
                stream_ids, producer_ids, epochs, first_sequences, record_counts, start_offsets
            ) AS given (stream_id, producer_id, epoch, sequence, record_count, start)
            ON CONFLICT DO NOTHING;
    END IF;
END
$$;
