package streammeta

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "streammeta.io/go/v1"
)

const poison = 13 // object id whose message a fakeController rejects as a whole

// fakeController commits uploads in the order in which they arrive, and breaks connections at random
// points: before a commit, or after it and before its answer.
type fakeController struct {
	v1.UnimplementedObjectServiceServer

	mu        sync.Mutex
	random    *rand.Rand
	committed []int64
	seen      map[int64]bool
}

func (f *fakeController) CommitPipeline(
	stream grpc.BidiStreamingServer[v1.CommitPipelineRequest, v1.CommitPipelineResponse],
) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := f.commit(request); err != nil {
			return err
		}
		answer := &v1.CommitPipelineResponse{Sequence: request.Sequence, Uploads: &v1.UploadErrors{}}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

func (f *fakeController) commit(request *v1.CommitPipelineRequest) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	point := f.random.IntN(6)
	if point == 0 {
		return status.Error(codes.Unavailable, "broken before")
	}
	for _, id := range request.Uploads.ObjectId {
		if id == poison {
			return rejection(request.Sequence)
		}
	}
	for _, id := range request.Uploads.ObjectId {
		if !f.seen[id] {
			f.seen[id] = true
			f.committed = append(f.committed, id)
		}
	}
	if point == 1 {
		return status.Error(codes.Unavailable, "broken after")
	}
	return nil
}

func rejection(sequence int64) error {
	state, err := status.New(codes.InvalidArgument, "object_size: -1").WithDetails(&errdetails.ErrorInfo{
		Domain:   domain,
		Reason:   "INVALID_FIELD",
		Metadata: map[string]string{"sequence": strconv.FormatInt(sequence, 10)},
	})
	if err != nil {
		return err
	}
	return state.Err()
}

// serve starts a fakeController and returns a node that uses it.
func serve(t *testing.T, seed uint64) (*fakeController, *Node) {
	fake := &fakeController{random: rand.New(rand.NewPCG(seed, 0)), seen: map[int64]bool{}}
	server := grpc.NewServer()
	v1.RegisterObjectServiceServer(server, fake)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	client, err := Dial([]string{listener.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	id, epoch := int32(1), int64(1)
	return fake, &Node{client, &v1.NodeIdentity{NodeId: &id, NodeEpoch: &epoch}}
}

func TestUploadsAreCommittedOnceAndInOrderWhateverBreaks(t *testing.T) {
	for seed := range uint64(10) {
		fake, node := serve(t, seed)
		pipeline := node.Pipeline()
		var outcomes []<-chan error
		for id := range int64(300) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			outcome, err := pipeline.Send(ctx, Upload{ObjectID: 100 + id, Size: 1})
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			outcomes = append(outcomes, outcome)
		}
		for index, outcome := range outcomes {
			if err := <-outcome; err != nil {
				t.Fatalf("seed %d: upload %d: %v", seed, index, err)
			}
		}
		pipeline.Close()
		if len(fake.committed) != 300 {
			t.Fatalf("seed %d: %d uploads were committed, expected 300", seed, len(fake.committed))
		}
		for index, id := range fake.committed {
			if id != 100+int64(index) {
				t.Fatalf("seed %d: upload %d was committed as number %d", seed, id-100, index)
			}
		}
	}
}

func TestARejectedMessageFailsAlone(t *testing.T) {
	_, node := serve(t, 1)
	pipeline := node.Pipeline()
	defer pipeline.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for id := range int64(20) {
		err := pipeline.Commit(ctx, Upload{ObjectID: id, Size: 1})
		var failure *Error
		isRejected := errors.As(err, &failure) && failure.Reason == "INVALID_FIELD"
		if isRejected != (id == poison) || (err != nil && !isRejected) {
			t.Fatalf("upload %d: %v", id, err)
		}
	}
}

func TestAClosedPipelineFailsWhatIsNotAnswered(t *testing.T) {
	client, err := Dial([]string{"127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	pipeline := (&Node{client, &v1.NodeIdentity{}}).Pipeline()
	outcome, err := pipeline.Send(context.Background(), Upload{ObjectID: 1})
	if err != nil {
		t.Fatal(err)
	}
	pipeline.Close()
	if err := <-outcome; !errors.Is(err, ErrClosed) {
		t.Fatalf("the outcome is %v, expected ErrClosed", err)
	}
	if _, err := pipeline.Send(context.Background(), Upload{}); !errors.Is(err, ErrClosed) {
		t.Fatalf("a later upload gets %v, expected ErrClosed", err)
	}
}

func TestAClosedClientFailsItsUploads(t *testing.T) {
	_, node := serve(t, 1)
	pipeline := node.Pipeline()
	defer pipeline.Close()
	node.client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := pipeline.Commit(ctx, Upload{ObjectID: 1, Size: 1}); err == nil || ctx.Err() != nil {
		t.Fatalf("the outcome is %v, expected a failure at once", err)
	}
}
