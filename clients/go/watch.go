package streammeta

import (
	"context"
	"errors"
	"iter"

	v1 "streammeta.io/go/v1"
)

// ErrSnapshotRequired ends a watch whose next change is no longer in the controllers' memory. Read
// the metadata again, and watch from the offset at which it was read.
var ErrSnapshotRequired = errors.New("the next change is gone, read the metadata again")

// Now begins a watch at the committed end. It yields every change after the call, and perhaps some
// before it.
const Now = -1

// WatchOption selects changes. Without options a watch yields all of them.
type WatchOption func(*v1.WatchRequest)

// OfKinds selects changes of these kinds of entities.
func OfKinds(kinds ...v1.EntityKind) WatchOption {
	return func(r *v1.WatchRequest) { r.Kinds = append(r.Kinds, kinds...) }
}

// OfStreams selects changes of these streams.
func OfStreams(ids ...int64) WatchOption {
	return func(r *v1.WatchRequest) { r.StreamIds = append(r.StreamIds, ids...) }
}

// OfKeys selects changes of the keys of a namespace that begin with prefix.
func OfKeys(namespace, prefix string) WatchOption {
	return func(r *v1.WatchRequest) {
		r.Kinds = append(r.Kinds, v1.EntityKind_ENTITY_KIND_KV)
		r.KvPrefixes = append(r.KvPrefixes, &v1.KVPrefix{Namespace: namespace, Prefix: prefix})
	}
}

// Watch yields the committed changes from offset from on, or from [Now] on, until ctx ends. After a
// failure it continues at another controller, and no change is lost or repeated. It ends with [ErrSnapshotRequired] if a
// change is missing, and with an [*Error] if the request is rejected.
func (c *Client) Watch(
	ctx context.Context, from int64, options ...WatchOption,
) iter.Seq2[*v1.MetadataChange, error] {
	return func(yield func(*v1.MetadataChange, error) bool) {
		// Each iteration begins at from, so each has a request of its own.
		request := &v1.WatchRequest{FromOffset: max(from, 0), FromNow: from == Now, Typed: true}
		for _, option := range options {
			option(request)
		}
		for ctx.Err() == nil {
			endpoint := c.router.leader()
			isWanted := true
			err := c.watchAt(ctx, endpoint, request, func(change *v1.MetadataChange) bool {
				isWanted = yield(change, nil)
				return isWanted
			})
			if !isWanted || ctx.Err() != nil {
				return
			}
			if errors.Is(err, ErrSnapshotRequired) {
				yield(nil, err)
				return
			}
			failure := readError(endpoint, err)
			// A slow watcher starts again at its next offset.
			if kindOf(failure) == final && failure.Reason != "WATCHER_TOO_SLOW" {
				yield(nil, failure)
				return
			}
			sleep(ctx, c.router.recordFailure(endpoint, failure))
		}
	}
}

// watchAt passes changes to handle until that returns false or the watch fails. It moves the start of
// the request behind what it has passed.
func (c *Client) watchAt(
	ctx context.Context,
	endpoint string,
	request *v1.WatchRequest,
	handle func(*v1.MetadataChange) bool,
) error {
	conn, err := c.conn(endpoint)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := v1.NewMetadataServiceClient(conn).Watch(ctx, request)
	if err != nil {
		return err
	}
	for {
		answer, err := stream.Recv()
		if err != nil {
			return err
		}
		if answer.SnapshotRequired {
			return ErrSnapshotRequired
		}
		for _, change := range answer.Changes {
			if !handle(change) {
				return nil
			}
		}
		request.FromOffset, request.FromNow = answer.Offset+1, false
	}
}
