// Runs the operations of a file by franz-go; prints one JSON array, a result for each.
//
// Arguments: bootstrap servers, and the file. An operation that fails gives the name of its error.
// With `sasl` before other arguments it authenticates instead, see `authenticated`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	patience = 60 * time.Second
	turn     = 100 * time.Millisecond
)

type operation struct {
	Op          string            `json:"op"`
	Topic       string            `json:"topic"`
	Partition   *int32            `json:"partition"`
	Partitions  int               `json:"partitions"`
	Configs     map[string]string `json:"configs"`
	Names       []string          `json:"names"`
	Acks        string            `json:"acks"`
	Compression string            `json:"compression"`
	Idempotent  bool              `json:"idempotent"`
	Records     [][3]any          `json:"records"`
	Count       int               `json:"count"`
	From        *int64            `json:"from"`
	At          json.RawMessage   `json:"at"`
	Before      int64             `json:"before"`
	Group       string            `json:"group"`
	Until       *int              `json:"until"`
}

type script struct {
	servers []string
	admin   *kadm.Client
}

func main() {
	if os.Args[1] == "sasl" {
		authenticated(os.Args[2:])
		return
	}
	data, err := os.ReadFile(os.Args[2])
	must(err)
	var asked []operation
	must(json.Unmarshal(data, &asked))
	servers := strings.Split(os.Args[1], ",")
	client, err := kgo.NewClient(kgo.SeedBrokers(servers...))
	must(err)
	defer client.Close()
	s := script{servers, kadm.NewClient(client)}
	results := make([]any, 0, len(asked))
	for _, one := range asked {
		result, err := s.repeated(one)
		if err != nil {
			result = map[string]string{"error": nameOf(err)}
		}
		results = append(results, result)
	}
	must(json.NewEncoder(os.Stdout).Encode(results))
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func nameOf(err error) string {
	var known *kerr.Error
	if errors.As(err, &known) {
		return known.Message
	}
	return err.Error()
}

// repeated returns the result once it is the one that is waited for, or the last.
func (s script) repeated(asked operation) (any, error) {
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		result, err := s.run(ctx, asked)
		cancel()
		if asked.Until == nil || result == *asked.Until || time.Now().After(deadline) {
			return result, err
		}
		time.Sleep(turn)
	}
}

func (s script) run(ctx context.Context, asked operation) (any, error) {
	switch asked.Op {
	case "brokers":
		found, err := s.admin.BrokerMetadata(ctx)
		return len(found.Brokers), err
	case "create":
		return s.create(ctx, asked)
	case "delete":
		found, err := s.admin.DeleteTopics(ctx, asked.Topic)
		return done(err, found[asked.Topic].Err)
	case "grow":
		found, err := s.admin.UpdatePartitions(ctx, asked.Partitions, asked.Topic)
		return done(err, found[asked.Topic].Err)
	case "describe":
		found, err := s.admin.ListTopics(ctx, asked.Topic)
		if err == nil {
			err = found[asked.Topic].Err
		}
		return len(found[asked.Topic].Partitions), err
	case "configs":
		return s.configs(ctx, asked)
	case "produce":
		return s.produce(ctx, asked)
	case "consume":
		return s.consume(ctx, asked)
	case "offset":
		return s.offset(ctx, asked)
	case "delete_records":
		return s.deleteRecords(ctx, asked)
	case "group":
		return s.group(ctx, asked)
	case "committed":
		return s.committed(ctx, asked)
	case "group_state":
		found, err := s.admin.DescribeGroups(ctx, asked.Group)
		return strings.ToUpper(found[asked.Group].State), err
	}
	return nil, fmt.Errorf("unknown operation %q", asked.Op)
}

func done(all ...error) (any, error) {
	return "done", errors.Join(all...)
}

func (s script) create(ctx context.Context, asked operation) (any, error) {
	configs := map[string]*string{}
	for name, value := range asked.Configs {
		configs[name] = &value
	}
	found, err := s.admin.CreateTopic(ctx, int32(asked.Partitions), 1, configs, asked.Topic)
	return done(err, found.Err)
}

func (s script) configs(ctx context.Context, asked operation) (any, error) {
	described, err := s.admin.DescribeTopicConfigs(ctx, asked.Topic)
	if err != nil {
		return nil, err
	}
	found := map[string]*string{}
	for _, name := range asked.Names {
		for _, one := range described[0].Configs {
			if one.Key == name {
				found[name] = one.Value
			}
		}
	}
	return found, described[0].Err
}

func (s script) client(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(s.servers...))...)
	must(err)
	return client
}

func (s script) produce(ctx context.Context, asked operation) (any, error) {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(),
		"snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	acks := map[string]kgo.Acks{"0": kgo.NoAck(), "1": kgo.LeaderAck(), "all": kgo.AllISRAcks()}
	options := []kgo.Opt{
		kgo.RequiredAcks(acks[asked.Acks]), kgo.ProducerLinger(20 * time.Millisecond),
		kgo.ProducerBatchCompression(codecs[asked.Compression]),
	}
	if !asked.Idempotent {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	if asked.Partition != nil {
		options = append(options, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	}
	client := s.client(options...)
	defer client.Close()
	var records []*kgo.Record
	for _, row := range asked.Records {
		record := &kgo.Record{Topic: asked.Topic, Key: []byte(row[1].(string))}
		record.Timestamp = time.UnixMilli(int64(row[0].(float64)))
		if row[2] != nil {
			record.Value = []byte(row[2].(string))
		}
		if asked.Partition != nil {
			record.Partition = *asked.Partition
		}
		records = append(records, record)
	}
	var outcomes [][2]int64
	for _, one := range client.ProduceSync(ctx, records...) {
		if one.Err != nil {
			return nil, one.Err
		}
		offset := one.Record.Offset
		if asked.Acks == "0" {
			offset = -1 // nobody has said
		}
		outcomes = append(outcomes, [2]int64{int64(one.Record.Partition), offset})
	}
	sort.Slice(outcomes, func(a, b int) bool {
		return outcomes[a][0] < outcomes[b][0] ||
			outcomes[a][0] == outcomes[b][0] && outcomes[a][1] < outcomes[b][1]
	})
	return outcomes, nil
}

func row(one *kgo.Record) []any {
	var value any
	if one.Value != nil {
		value = string(one.Value)
	}
	return []any{one.Offset, one.Timestamp.UnixMilli(), string(one.Key), value, one.LeaderEpoch}
}

func (s script) consume(ctx context.Context, asked operation) (any, error) {
	from := kgo.NewOffset().AtStart()
	if asked.From != nil {
		from = kgo.NewOffset().At(*asked.From)
	}
	place := map[string]map[int32]kgo.Offset{asked.Topic: {*asked.Partition: from}}
	client := s.client(kgo.ConsumePartitions(place), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	defer client.Close()
	var seen [][]any
	for len(seen) < asked.Count {
		fetched := client.PollFetches(ctx)
		for _, one := range fetched.Errors() {
			return nil, one.Err
		}
		fetched.EachRecord(func(one *kgo.Record) { seen = append(seen, row(one)) })
	}
	return seen, nil
}

func (s script) offset(ctx context.Context, asked operation) (any, error) {
	at := strings.Trim(string(asked.At), `"`)
	var listed kadm.ListedOffsets
	var err error
	switch at {
	case "earliest":
		listed, err = s.admin.ListStartOffsets(ctx, asked.Topic)
	case "latest":
		listed, err = s.admin.ListEndOffsets(ctx, asked.Topic)
	default:
		ms, wrong := strconv.ParseInt(at, 10, 64)
		must(wrong)
		listed, err = s.admin.ListOffsetsAfterMilli(ctx, ms, asked.Topic)
	}
	found, _ := listed.Lookup(asked.Topic, *asked.Partition)
	return []any{found.Offset, found.Timestamp, found.LeaderEpoch}, errors.Join(err, found.Err)
}

func (s script) deleteRecords(ctx context.Context, asked operation) (any, error) {
	var below kadm.Offsets
	below.AddOffset(asked.Topic, *asked.Partition, asked.Before, -1)
	answered, err := s.admin.DeleteRecords(ctx, below)
	found, _ := answered.Lookup(asked.Topic, *asked.Partition)
	return found.LowWatermark, errors.Join(err, found.Err)
}

// member is one consumer of a group, and how far it has read the partitions that it has.
type member struct {
	client    *kgo.Client
	guard     sync.Mutex
	positions map[int32]int64
}

func (s script) join(asked operation) *member {
	joined := &member{positions: map[int32]int64{}}
	given := func(_ context.Context, _ *kgo.Client, places map[string][]int32) {
		joined.guard.Lock()
		defer joined.guard.Unlock()
		for _, one := range places[asked.Topic] {
			joined.positions[one] = 0
		}
	}
	taken := func(_ context.Context, _ *kgo.Client, places map[string][]int32) {
		joined.guard.Lock()
		defer joined.guard.Unlock()
		for _, one := range places[asked.Topic] {
			delete(joined.positions, one)
		}
	}
	joined.client = s.client(
		kgo.ConsumerGroup(asked.Group), kgo.ConsumeTopics(asked.Topic), kgo.DisableAutoCommit(),
		kgo.Balancers(kgo.RangeBalancer()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(10*time.Second), kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsAssigned(given), kgo.OnPartitionsRevoked(taken), kgo.OnPartitionsLost(taken),
	)
	return joined
}

// poll reads for a turn; it returns the number of partitions and the sum of the positions in them.
func (m *member) poll(ctx context.Context, seen map[string]any) (int, int64) {
	limited, cancel := context.WithTimeout(ctx, turn)
	defer cancel()
	fetched := m.client.PollFetches(limited)
	m.guard.Lock()
	fetched.EachRecord(func(one *kgo.Record) {
		seen[fmt.Sprintf("%d/%d", one.Partition, one.Offset)] = row(one)
		m.positions[one.Partition] = one.Offset + 1
	})
	sum := int64(0)
	for _, one := range m.positions {
		sum += one
	}
	share := len(m.positions)
	m.guard.Unlock()
	m.client.AllowRebalance()
	return share, sum
}

func (m *member) commit(ctx context.Context, topic string) error {
	m.guard.Lock()
	offsets := map[int32]kgo.EpochOffset{}
	for partition, at := range m.positions {
		offsets[partition] = kgo.EpochOffset{Epoch: -1, Offset: at}
	}
	m.guard.Unlock()
	places := map[string]map[int32]kgo.EpochOffset{topic: offsets}
	var outcome error
	m.client.CommitOffsetsSync(ctx, places, func(
		_ *kgo.Client, _ *kmsg.OffsetCommitRequest, answer *kmsg.OffsetCommitResponse, err error,
	) {
		outcome = err
		if err == nil {
			for _, one := range answer.Topics[0].Partitions {
				outcome = errors.Join(outcome, kerr.ErrorForCode(one.ErrorCode))
			}
		}
	})
	return outcome
}

func (s script) group(ctx context.Context, asked operation) (any, error) {
	members := []*member{s.join(asked), s.join(asked)}
	seen := map[string]any{}
	shares := []int{0, 0}
	for ctx.Err() == nil {
		sum := int64(0)
		for at, one := range members {
			share, position := one.poll(ctx, seen)
			shares[at] = share
			sum += position
		}
		isShared := shares[0] > 0 && shares[1] > 0 && shares[0]+shares[1] == asked.Partitions
		if isShared && sum == int64(asked.Count) {
			break
		}
	}
	var failed error
	for _, one := range members {
		failed = errors.Join(failed, one.commit(ctx, asked.Topic))
	}
	for _, one := range members {
		one.client.CloseAllowingRebalance()
	}
	sort.Ints(shares)
	return map[string]any{"shares": shares, "seen": seen}, failed
}

func (s script) committed(ctx context.Context, asked operation) (any, error) {
	found, err := s.admin.FetchOffsets(ctx, asked.Group)
	if err != nil {
		return nil, err
	}
	rows := [][2]int64{}
	found.Each(func(one kadm.OffsetResponse) {
		rows = append(rows, [2]int64{int64(one.Partition), one.At})
	})
	sort.Slice(rows, func(a, b int) bool { return rows[a][0] < rows[b][0] })
	return rows, nil
}
