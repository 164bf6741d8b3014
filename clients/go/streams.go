package streammeta

import (
	"context"
	"iter"

	"google.golang.org/protobuf/proto"

	v1 "streammeta.io/go/v1"
)

// Stream is a stream that its node has opened.
type Stream struct {
	ID    int64
	Epoch int64
	Start int64 // first visible offset when it was opened
	Next  int64 // offset at which the next commit must start, when it was opened

	node *Node
}

// CreateStreams creates one closed, empty stream for each element of tags: all or none.
func (n *Node) CreateStreams(ctx context.Context, tags ...Tags) ([]int64, error) {
	request := &v1.CreateStreamsRequest{RequestId: newRequestID(), Node: n.identity}
	for _, labels := range tags {
		request.Streams = append(request.Streams, &v1.NewStream{Tags: labels.encode()})
	}
	answer, err := call[v1.CreateStreamsResponse](
		ctx, n.client, v1.StreamService_CreateStreams_FullMethodName, request)
	if err != nil {
		return nil, err
	}
	return answer.StreamIds, itemError(answer.Error, "node %d", n.ID())
}

// OpenStream acquires ownership of a stream under a new epoch. A stream that this node has open, in
// this or an earlier process, continues in a new range.
func (n *Node) OpenStream(ctx context.Context, id int64) (*Stream, error) {
	described, err := n.client.DescribeStream(ctx, id)
	if err != nil {
		return nil, err
	}
	epoch := int64(0)
	if described.Epoch != nil {
		epoch = *described.Epoch + 1
	}
	return n.OpenStreamAt(ctx, id, epoch)
}

// OpenStreamAt is OpenStream with an epoch, which must be larger than the stream's epoch.
func (n *Node) OpenStreamAt(ctx context.Context, id, epoch int64) (*Stream, error) {
	answer, err := call[v1.OpenStreamsResponse](
		ctx, n.client, v1.StreamService_OpenStreams_FullMethodName,
		&v1.OpenStreamsRequest{
			RequestId: newRequestID(),
			Node:      n.identity,
			Streams:   []*v1.StreamToOpen{{StreamId: &id, StreamEpoch: &epoch, Reopen: true}},
		})
	if err != nil {
		return nil, err
	}
	opened := answer.Streams[0]
	if err := itemError(opened.Error, "stream %d", id); err != nil {
		return nil, err
	}
	return &Stream{
		ID: id, Epoch: epoch, Start: opened.GetStartOffset(), Next: opened.GetNextOffset(), node: n,
	}, nil
}

// Close releases the stream. Everything that was acknowledged must be committed.
func (s *Stream) Close(ctx context.Context) error {
	answer, err := call[v1.CloseStreamsResponse](
		ctx, s.node.client, v1.StreamService_CloseStreams_FullMethodName,
		&v1.CloseStreamsRequest{
			RequestId: newRequestID(),
			Node:      s.node.identity,
			Streams:   []*v1.StreamToClose{{StreamId: &s.ID, StreamEpoch: &s.Epoch}},
		})
	if err != nil {
		return err
	}
	return itemError(answer.Errors[0], "stream %d", s.ID)
}

// Trim moves the visible start of the stream to start, at most to the committed end, and returns the
// new start.
func (s *Stream) Trim(ctx context.Context, start int64) (int64, error) {
	answer, err := call[v1.TrimStreamsResponse](
		ctx, s.node.client, v1.StreamService_TrimStreams_FullMethodName,
		&v1.TrimStreamsRequest{
			RequestId: newRequestID(),
			Node:      s.node.identity,
			Streams: []*v1.StreamToTrim{{
				StreamId:          &s.ID,
				StreamEpoch:       &s.Epoch,
				NewStartOffset:    &start,
				AppendedEndOffset: proto.Int64(0),
			}},
		})
	if err != nil {
		return 0, err
	}
	return answer.StartOffsets[0], itemError(answer.Errors[0], "stream %d", s.ID)
}

// Delete permanently deletes the stream, which must be closed.
func (s *Stream) Delete(ctx context.Context) error {
	answer, err := call[v1.DeleteStreamsResponse](
		ctx, s.node.client, v1.StreamService_DeleteStreams_FullMethodName,
		&v1.DeleteStreamsRequest{
			RequestId: newRequestID(),
			Node:      s.node.identity,
			Streams:   []*v1.StreamToDelete{{StreamId: &s.ID, StreamEpoch: &s.Epoch}},
		})
	if err != nil {
		return err
	}
	return itemError(answer.Errors[0], "stream %d", s.ID)
}

// DescribeStream describes one stream. The error has the code STREAM_NOT_EXIST if there is none.
func (c *Client) DescribeStream(ctx context.Context, id int64) (*v1.StreamDescription, error) {
	answer, err := call[v1.DescribeStreamsResponse](
		ctx, c, v1.StreamService_DescribeStreams_FullMethodName,
		&v1.DescribeStreamsRequest{StreamIds: []int64{id}})
	if err != nil {
		return nil, err
	}
	if len(answer.Streams) == 0 {
		return nil, itemError(v1.ErrorCode_ERROR_CODE_STREAM_NOT_EXIST, "stream %d", id)
	}
	return answer.Streams[0], nil
}

// FindStreams yields the streams that have all of these tags, in id order.
func (c *Client) FindStreams(ctx context.Context, tags Tags) iter.Seq2[*v1.StreamDescription, error] {
	return pages(func(token string) ([]*v1.StreamDescription, string, error) {
		answer, err := call[v1.FindStreamsResponse](
			ctx, c, v1.StreamService_FindStreams_FullMethodName,
			&v1.FindStreamsRequest{Tags: tags.encode(), Page: &v1.PageRequest{PageToken: token}})
		if err != nil {
			return nil, "", err
		}
		return answer.Streams, answer.NextPageToken, nil
	})
}
