package streammeta

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"

	v1 "streammeta.io/go/v1"
)

// Node is one process of a broker. Its epoch fences every older process with the same id.
type Node struct {
	client   *Client
	identity *v1.NodeIdentity
}

// NodeOption describes a node at its registration.
type NodeOption func(*v1.RegisterNodeRequest)

// WithWALConfig says where the node's write-ahead log is. Controllers hand it to the node that
// recovers this one.
func WithWALConfig(config string) NodeOption {
	return func(r *v1.RegisterNodeRequest) { r.WalConfig = config }
}

// WithNodeTags labels the node. The tags replace earlier ones.
func WithNodeTags(tags Tags) NodeOption {
	return func(r *v1.RegisterNodeRequest) { r.Tags = tags.encode() }
}

// WithEpoch sets the epoch of the process. The default is its start time in milliseconds.
func WithEpoch(epoch int64) NodeOption {
	return func(r *v1.RegisterNodeRequest) { r.Node.NodeEpoch = &epoch }
}

// Register announces this process as node id. The error has the code NODE_EPOCH_EXPIRED if a newer
// process has registered, and NODE_FENCED if another node recovers this one.
func (c *Client) Register(ctx context.Context, id int32, options ...NodeOption) (*Node, error) {
	identity := &v1.NodeIdentity{NodeId: &id, NodeEpoch: proto.Int64(time.Now().UnixMilli())}
	request := &v1.RegisterNodeRequest{Node: identity, ProcessId: newRequestID()}
	for _, option := range options {
		option(request)
	}
	answer, err := call[v1.RegisterNodeResponse](
		ctx, c, v1.NodeService_RegisterNode_FullMethodName, request)
	if err != nil {
		return nil, err
	}
	if err := itemError(answer.Error, "node %d", id); err != nil {
		return nil, err
	}
	return &Node{client: c, identity: identity}, nil
}

// ID returns the node's id.
func (n *Node) ID() int32 { return n.identity.GetNodeId() }

// Epoch returns the epoch of this process.
func (n *Node) Epoch() int64 { return n.identity.GetNodeEpoch() }

// Heartbeat keeps the node's session alive and returns the work that is meant for the node. From its
// first heartbeat on, the node is fenced if it is silent for the session timeout of the answer.
func (n *Node) Heartbeat(ctx context.Context) (*v1.HeartbeatResponse, error) {
	answer, err := call[v1.HeartbeatResponse](ctx, n.client,
		v1.NodeService_Heartbeat_FullMethodName, &v1.HeartbeatRequest{Node: n.identity})
	if err != nil {
		return nil, err
	}
	return answer, itemError(answer.Error, "node %d", n.ID())
}

// KeepAlive sends heartbeats until ctx ends or a heartbeat is rejected, for example because another
// process fenced this one. While no controller answers, it goes on. It calls onWork, if that is not nil,
// with each answer.
func (n *Node) KeepAlive(ctx context.Context, onWork func(*v1.HeartbeatResponse)) error {
	interval := time.Second
	for {
		answer, err := n.Heartbeat(ctx)
		var failure *Error
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			// Two heartbeats may be lost before the session ends.
			interval = time.Duration(answer.SessionTimeoutMs) * time.Millisecond / 3
			if onWork != nil {
				onWork(answer)
			}
		case !errors.As(err, &failure) || kindOf(failure) == final:
			return err
		}
		if !sleep(ctx, interval) {
			return ctx.Err()
		}
	}
}

// Unregister forgets the node, which must have neither open streams nor pending uploads.
func (n *Node) Unregister(ctx context.Context) error {
	answer, err := call[v1.UnregisterNodeResponse](
		ctx, n.client, v1.NodeService_UnregisterNode_FullMethodName,
		&v1.UnregisterNodeRequest{RequestId: newRequestID(), Node: n.identity})
	if err != nil {
		return err
	}
	return itemError(answer.Error, "node %d", n.ID())
}
