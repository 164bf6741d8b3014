package streammeta

import (
	"context"
	"fmt"
	"slices"
	"time"

	v1 "streammeta.io/go/v1"
)

// PrepareObjects issues count consecutive object ids and returns the first. They expire unless they
// are committed within ttl (1 s to 7 days).
func (n *Node) PrepareObjects(ctx context.Context, count int32, ttl time.Duration) (int64, error) {
	answer, err := call[v1.PrepareObjectsResponse](
		ctx, n.client, v1.ObjectService_PrepareObjects_FullMethodName,
		&v1.PrepareObjectsRequest{
			RequestId: newRequestID(), Node: n.identity, Count: count, TtlMs: ttl.Milliseconds(),
		})
	if err != nil {
		return 0, err
	}
	return answer.FirstObjectId, itemError(answer.Error, "node %d", n.ID())
}

// Lookup contains the objects of a range of a stream, contiguous from its start.
type Lookup struct {
	Objects []*v1.ObjectSlice
	Start   int64 // first visible offset of the stream
	End     int64 // committed end of the stream
}

// Objects finds the objects that contain the offsets from start to end of a stream. The first one
// contains start, and the last one may reach beyond end.
func (c *Client) Objects(ctx context.Context, stream, start, end int64) (*Lookup, error) {
	answer, err := call[v1.GetObjectsResponse](
		ctx, c, v1.ObjectService_GetObjects_FullMethodName,
		&v1.GetObjectsRequest{Queries: []*v1.ObjectQuery{
			{StreamId: &stream, StartOffset: start, EndOffset: &end},
		}})
	if err != nil {
		return nil, err
	}
	found := answer.Results[0]
	lookup := &Lookup{found.Objects, found.GetStreamStartOffset(), found.GetStreamEndOffset()}
	return lookup, itemError(found.Error, "stream %d at offset %d", stream, start)
}

// ObjectKey returns the key of an object in the bucket. namespace is the object namespace that
// [Client.DescribeCluster] returns.
func ObjectKey(namespace string, id int64) string {
	// Reversed digits spread consecutive ids over the prefixes of the bucket.
	digits := []byte(fmt.Sprintf("%08x", id))
	slices.Reverse(digits)
	return fmt.Sprintf("%s/%s/%d", digits, namespace, id)
}
