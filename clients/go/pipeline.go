package streammeta

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	v1 "streammeta.io/go/v1"
)

const (
	inFlightMost = 1024 // uploads without an outcome, per pipeline
	batchMost    = 128  // uploads per message
)

// ErrClosed is the outcome of an upload that was not sent before its pipeline was closed.
var ErrClosed = errors.New("the pipeline is closed")

// Range is a part of a stream in a stream set object: offsets from Start to End, exclusive.
type Range struct {
	Stream int64
	Epoch  int64 // under which the writer opened the stream
	Start  int64
	End    int64
}

// Upload is an uploaded stream set object to commit. ObjectID is prepared, and Ranges are sorted by
// stream, one for each.
type Upload struct {
	ObjectID int64
	Size     int64 // in bytes
	Ranges   []Range
}

// Pipeline commits many uploads of a node on one connection. It keeps their order, sends unanswered
// ones again to the next leader, and combines waiting ones in one message.
type Pipeline struct {
	node *Node
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}
	room chan struct{} // one token for each upload without an outcome
	wake chan struct{}

	mu       sync.Mutex
	closed   bool
	queue    []*pending
	batches  []*batch // without an answer, oldest first
	sent     int      // number of batches sent on the present connection
	sequence int64
	watchdog *time.Timer
}

type pending struct {
	upload  Upload
	outcome chan error
}

type batch struct {
	request *v1.CommitPipelineRequest
	uploads []*pending
}

// Pipeline returns a pipeline for the node's uploads. Close it.
func (n *Node) Pipeline() *Pipeline {
	ctx, stop := context.WithCancel(context.Background())
	pipeline := &Pipeline{
		node: n,
		ctx:  ctx,
		stop: stop,
		done: make(chan struct{}),
		room: make(chan struct{}, inFlightMost),
		wake: make(chan struct{}, 1),
	}
	go pipeline.run()
	return pipeline
}

// Close stops the pipeline. The outcome of uploads that were sent and not answered is unknown.
func (p *Pipeline) Close() {
	p.stop()
	<-p.done
}

// Commit commits an upload and waits for its outcome.
func (p *Pipeline) Commit(ctx context.Context, upload Upload) error {
	outcome, err := p.Send(ctx, upload)
	if err != nil {
		return err
	}
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return &Error{Message: "no outcome of the commit in time", unknown: true, cause: ctx.Err()}
	}
}

// Send queues an upload, waiting while too many are in flight, and returns a channel that receives
// its outcome. Uploads that share a stream are sent in the order of these calls.
func (p *Pipeline) Send(ctx context.Context, upload Upload) (<-chan error, error) {
	select {
	case p.room <- struct{}{}:
	case <-p.done:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}

	waiting := &pending{upload, make(chan error, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	p.queue = append(p.queue, waiting)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return waiting.outcome, nil
}

func (p *Pipeline) run() {
	defer close(p.done)
	defer p.end()
	for p.waitForWork() {
		endpoint := p.node.client.router.leader()
		failure := readError(endpoint, p.serve(endpoint))
		if p.ctx.Err() != nil {
			return
		}
		if kindOf(failure) == final {
			p.reject(failure)
			continue
		}
		sleep(p.ctx, p.node.client.router.recordFailure(endpoint, failure))
	}
}

// end rejects later uploads, and ends the present ones.
func (p *Pipeline) end() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.failAll(&Error{Message: "the pipeline was closed", unknown: true, cause: ErrClosed}, ErrClosed)
}

// waitForWork waits until an upload has no outcome. It reports false once the pipeline is closed.
func (p *Pipeline) waitForWork() bool {
	for {
		p.mu.Lock()
		has := len(p.queue)+len(p.batches) > 0
		p.mu.Unlock()
		if has && p.ctx.Err() == nil {
			return true
		}
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return false
		}
	}
}

// serve sends batches to endpoint on one connection until that ends, and returns why.
func (p *Pipeline) serve(endpoint string) error {
	conn, err := p.node.client.conn(endpoint)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	stream, err := v1.NewObjectServiceClient(conn).CommitPipeline(ctx)
	if err != nil {
		return err
	}

	ended := make(chan error, 1)
	p.mu.Lock()
	// Everything without an answer is sent again, in order, before anything newer.
	p.sent = 0
	p.watchdog = time.AfterFunc(attemptTimeout, cancel)
	defer p.watchdog.Stop()
	p.mu.Unlock()
	go func() {
		defer cancel()
		for {
			answer, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			p.node.client.router.recordAnswer(endpoint)
			if !p.resolve(answer) {
				ended <- errors.New("an answer that belongs to no request")
				return
			}
		}
	}()

	for {
		next := p.next(ctx)
		if next == nil || stream.Send(next.request) != nil {
			break
		}
	}
	// A failed Send says nothing: Recv returns the status.
	return <-ended
}

// next returns the next batch to send on the present connection, nil once that has ended.
func (p *Pipeline) next(ctx context.Context) *batch {
	for ctx.Err() == nil {
		p.mu.Lock()
		if p.sent == len(p.batches) && len(p.queue) > 0 {
			p.form()
		}
		if p.sent < len(p.batches) {
			next := p.batches[p.sent]
			p.sent++
			p.sequence++
			next.request.Sequence = p.sequence
			if p.sent == 1 {
				p.watchdog.Reset(attemptTimeout)
			}
			p.mu.Unlock()
			return next
		}
		if len(p.batches) == 0 {
			p.watchdog.Stop() // nothing is unanswered
		}
		p.mu.Unlock()
		select {
		case <-p.wake:
		case <-ctx.Done():
		}
	}
	return nil
}

// form makes a batch of queued uploads.
func (p *Pipeline) form() {
	count := min(len(p.queue), batchMost)
	uploads := slices.Clone(p.queue[:count])
	p.queue = slices.Delete(p.queue, 0, count)

	columns := &v1.UploadColumns{Node: p.node.identity, Ranges: &v1.RangeColumns{}}
	for _, waiting := range uploads {
		upload := waiting.upload
		columns.ObjectId = append(columns.ObjectId, upload.ObjectID)
		columns.ObjectSize = append(columns.ObjectSize, upload.Size)
		columns.RangeCount = append(columns.RangeCount, int64(len(upload.Ranges)))
		for _, part := range upload.Ranges {
			columns.Ranges.StreamId = append(columns.Ranges.StreamId, part.Stream)
			columns.Ranges.StreamEpoch = append(columns.Ranges.StreamEpoch, part.Epoch)
			columns.Ranges.StartOffset = append(columns.Ranges.StartOffset, part.Start)
			columns.Ranges.EndOffset = append(columns.Ranges.EndOffset, part.End)
		}
	}
	request := &v1.CommitPipelineRequest{Uploads: columns}
	p.batches = append(p.batches, &batch{request, uploads})
}

// resolve delivers the outcomes of the oldest batch. It reports false if the answer is for another.
func (p *Pipeline) resolve(answer *v1.CommitPipelineResponse) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	codes := answer.GetUploads().GetErrors()
	if p.sent == 0 || answer.Sequence != p.batches[0].request.Sequence {
		return false
	}
	answered := p.batches[0]
	if len(codes) != 0 && len(codes) != len(answered.uploads) {
		return false
	}
	p.batches = slices.Delete(p.batches, 0, 1)
	p.sent--
	p.watchdog.Reset(attemptTimeout)
	for row, waiting := range answered.uploads {
		code := v1.ErrorCode_ERROR_CODE_NONE
		if len(codes) > 0 {
			code = codes[row]
		}
		p.finish(waiting, itemError(code, "object %d", waiting.upload.ObjectID))
	}
	return true
}

// reject ends the batch that a controller rejected permanently, or everything if it names none.
func (p *Pipeline) reject(failure *Error) {
	sequence, err := strconv.ParseInt(failure.Metadata["sequence"], 10, 64)
	if err != nil {
		p.failAll(failure, failure)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.batches = slices.DeleteFunc(p.batches, func(sent *batch) bool {
		if sent.request.Sequence != sequence {
			return false
		}
		for _, waiting := range sent.uploads {
			p.finish(waiting, failure)
		}
		return true
	})
}

// failAll ends the uploads that were sent, and those that were not.
func (p *Pipeline) failAll(sentOutcome, queuedOutcome error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, sent := range p.batches {
		for _, waiting := range sent.uploads {
			p.finish(waiting, sentOutcome)
		}
	}
	for _, waiting := range p.queue {
		p.finish(waiting, queuedOutcome)
	}
	p.batches, p.queue = nil, nil
}

func (p *Pipeline) finish(waiting *pending, outcome error) {
	waiting.outcome <- outcome
	<-p.room
}
