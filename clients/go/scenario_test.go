package streammeta

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "streammeta.io/go/v1"
)

// The scenarios come from tests/clients/scenarios.yaml, as JSON. tests/clients starts the cluster.
const (
	endpointsVariable = "STREAMMETA_ENDPOINTS"
	scenariosVariable = "STREAMMETA_SCENARIOS"
)

type step map[string]any

type scenario struct {
	Name  string
	Steps []step
}

func TestScenarios(t *testing.T) {
	endpoints, file := os.Getenv(endpointsVariable), os.Getenv(scenariosVariable)
	if endpoints == "" || file == "" {
		t.Skipf("%s and %s are not set: run pytest tests/clients", endpointsVariable, scenariosVariable)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var scenarios []scenario
	if err := json.Unmarshal(text, &scenarios); err != nil {
		t.Fatal(err)
	}
	client, err := Dial(strings.Split(endpoints, ","))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	for _, scenario := range scenarios {
		t.Run(scenario.Name, func(t *testing.T) {
			runner := &runner{
				client:  client,
				saved:   map[string]any{},
				nodes:   map[string]*Node{},
				streams: map[int64]*Stream{},
			}
			for number, step := range scenario.Steps {
				if err := runner.run(step); err != nil {
					t.Fatalf("step %d, %v: %v", number+1, step["do"], err)
				}
			}
		})
	}
}

// runner runs the steps of one scenario.
type runner struct {
	client  *Client
	saved   map[string]any
	nodes   map[string]*Node
	streams map[int64]*Stream // as they were opened last
}

func (r *runner) run(written step) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	step := r.resolve(map[string]any(written)).(map[string]any)
	results, err := r.perform(ctx, step)
	if err != nil {
		name, known := errorName(err)
		if !known {
			return err
		}
		results = map[string]any{"error": name}
	}

	expected, _ := step["expect"].(map[string]any)
	if _, fails := results["error"]; fails && expected["error"] == nil {
		return fmt.Errorf("failed: %w", err)
	}
	for field, want := range expected {
		if got := normalize(results[field]); !reflect.DeepEqual(got, want) {
			return fmt.Errorf("%s is %v, expected %v", field, got, want)
		}
	}
	save, _ := step["save"].(map[string]any)
	for name, field := range save {
		r.saved[name] = normalize(results[field.(string)])
	}
	return nil
}

// resolve replaces names by the values that were saved under them.
func (r *runner) resolve(value any) any {
	switch value := value.(type) {
	case map[string]any:
		resolved := map[string]any{}
		for key, item := range value {
			resolved[key] = r.resolve(item)
		}
		return resolved
	case []any:
		resolved := make([]any, len(value))
		for index, item := range value {
			resolved[index] = r.resolve(item)
		}
		return resolved
	case string:
		if !strings.HasPrefix(value, "$") {
			return value
		}
		name, added, adds := strings.Cut(value[1:], " + ")
		if !adds {
			return r.saved[name]
		}
		number, err := strconv.Atoi(added)
		if err != nil {
			panic(err)
		}
		return r.saved[name].(float64) + float64(number)
	}
	return value
}

// normalize returns a value as JSON would.
func normalize(value any) any {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	var decoded any
	if err := json.Unmarshal(text, &decoded); err != nil {
		panic(err)
	}
	return decoded
}

func errorName(err error) (string, bool) {
	var item *ItemError
	if errors.As(err, &item) {
		return CodeName(item.Code), true
	}
	var failure *Error
	if errors.As(err, &failure) && failure.Reason != "" {
		return failure.Reason, true
	}
	return "", false
}

func (r *runner) perform(ctx context.Context, step map[string]any) (map[string]any, error) {
	text := func(name string) string { value, _ := step[name].(string); return value }
	number := func(name string) int64 { value, _ := step[name].(float64); return int64(value) }
	node := r.nodes[fmt.Sprint(step["node"])]
	stream := r.streams[number("stream")]
	keys := r.client.Keys(text("namespace"))

	switch step["do"] {
	case "register":
		return r.register(ctx, step)
	case "heartbeat":
		_, err := node.Heartbeat(ctx)
		return nil, err
	case "create_stream":
		ids, err := node.CreateStreams(ctx, tagsOf(step))
		if err != nil {
			return nil, err
		}
		return map[string]any{"stream": ids[0]}, nil
	case "open_stream":
		opened, err := node.OpenStream(ctx, number("stream"))
		if err != nil {
			return nil, err
		}
		r.streams[opened.ID] = opened
		return map[string]any{"start": opened.Start, "next": opened.Next}, nil
	case "close_stream":
		return nil, stream.Close(ctx)
	case "delete_stream":
		return nil, stream.Delete(ctx)
	case "trim":
		start, err := stream.Trim(ctx, number("start"))
		return map[string]any{"start": start}, err
	case "describe_stream":
		return r.describe(ctx, number("stream"))
	case "find_streams":
		ids := []int64{}
		for found, err := range r.client.FindStreams(ctx, tagsOf(step)) {
			if err != nil {
				return nil, err
			}
			ids = append(ids, found.StreamId)
		}
		return map[string]any{"streams": ids}, nil
	case "prepare":
		first, err := node.PrepareObjects(ctx, int32(number("count")), time.Minute)
		return map[string]any{"first": first}, err
	case "commit":
		return nil, r.commit(ctx, node, step)
	case "name_objects":
		return nil, r.nameObjects(ctx, node, step)
	case "delete_objects":
		owner := OwnedByKey(text("namespace"), text("key"))
		deleted, err := node.DeleteObjectsOf(ctx, owner, step["with_key"] == true)
		return map[string]any{"key_deleted": deleted}, err
	case "count_objects":
		count := 0
		for _, err := range r.client.NamedObjects(ctx, text("prefix")) {
			if err != nil {
				return nil, err
			}
			count++
		}
		return map[string]any{"count": count}, nil
	case "objects":
		return r.objects(ctx, number("stream"), number("start"), number("end"))
	case "put":
		put := func() (int64, error) { return keys.Put(ctx, text("key"), []byte(text("value"))) }
		if _, conditional := step["version"]; conditional {
			put = func() (int64, error) {
				return keys.PutIfVersion(ctx, text("key"), []byte(text("value")), number("version"))
			}
		}
		version, err := put()
		return map[string]any{"version": version}, err
	case "get":
		value, err := keys.Get(ctx, text("key"))
		if err != nil || value == nil {
			return map[string]any{"value": nil}, err
		}
		return map[string]any{"value": string(value.Bytes), "version": value.Version}, nil
	case "delete":
		if _, conditional := step["version"]; conditional {
			return nil, keys.DeleteIfVersion(ctx, text("key"), number("version"))
		}
		return nil, keys.Delete(ctx, text("key"))
	case "list":
		names := []string{}
		for entry, err := range keys.List(ctx, text("prefix")) {
			if err != nil {
				return nil, err
			}
			names = append(names, entry.Key)
		}
		return map[string]any{"keys": names}, nil
	case "end_offset":
		described, err := r.client.DescribeCluster(ctx)
		return map[string]any{"offset": described.GetHighWatermark()}, err
	case "watch_keys":
		return r.watchKeys(ctx, step)
	case "move_leadership":
		_, err := call[v1.TransferLeadershipResponse](ctx, r.client,
			v1.AdminService_TransferLeadership_FullMethodName, &v1.TransferLeadershipRequest{})
		return nil, err
	}
	return nil, fmt.Errorf("unknown step %v", step["do"])
}

func tagsOf(step map[string]any) Tags {
	tags := Tags{}
	for key, value := range step["tags"].(map[string]any) {
		tags[key] = value.(string)
	}
	return tags
}

func (r *runner) register(ctx context.Context, step map[string]any) (map[string]any, error) {
	var options []NodeOption
	if epoch, ok := step["epoch"].(float64); ok {
		options = append(options, WithEpoch(int64(epoch)))
	}
	node, err := r.client.Register(ctx, int32(step["node"].(float64)), options...)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprint(step["node"])
	if other, ok := step["as"].(string); ok {
		name = other
	}
	r.nodes[name] = node
	return nil, nil
}

func (r *runner) describe(ctx context.Context, id int64) (map[string]any, error) {
	found, err := r.client.DescribeStream(ctx, id)
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"start": found.StartOffset,
		"end":   found.EndOffset,
		"state": strings.TrimPrefix(found.State.String(), "STREAM_STATE_"),
		"node":  found.NodeId,
	}, nil
}

func (r *runner) commit(ctx context.Context, node *Node, step map[string]any) error {
	upload := Upload{ObjectID: int64(step["object_id"].(float64)), Size: int64(step["size"].(float64))}
	for _, row := range step["ranges"].([]any) {
		part := row.([]any)
		id := int64(part[0].(float64))
		upload.Ranges = append(upload.Ranges, Range{
			Stream: id,
			Epoch:  r.streams[id].Epoch,
			Start:  int64(part[1].(float64)),
			End:    int64(part[2].(float64)),
		})
	}
	pipeline := node.Pipeline()
	defer pipeline.Close()
	return pipeline.Commit(ctx, upload)
}

func (r *runner) nameObjects(ctx context.Context, node *Node, step map[string]any) error {
	count := int32(step["count"].(float64))
	first, err := node.PrepareObjects(ctx, count, time.Minute)
	if err != nil {
		return err
	}
	var uploads []NamedUpload
	for number := range int64(count) {
		uploads = append(uploads, NamedUpload{
			ObjectID: first + number,
			Name:     fmt.Sprint(step["prefix"], number),
			Owner:    OwnedByKey(step["namespace"].(string), step["key"].(string)),
		})
	}
	for batch := range slices.Chunk(uploads, 1000) {
		if err := node.CommitNamedObjects(ctx, batch...); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) objects(ctx context.Context, stream, start, end int64) (map[string]any, error) {
	lookup, err := r.client.Objects(ctx, stream, start, end)
	if err != nil {
		return nil, err
	}
	rows := [][]int64{}
	for _, slice := range lookup.Objects {
		rows = append(rows, []int64{slice.ObjectId, slice.StartOffset, slice.EndOffset})
	}
	return map[string]any{"objects": rows, "end": lookup.End}, nil
}

func (r *runner) watchKeys(ctx context.Context, step map[string]any) (map[string]any, error) {
	changes := [][]any{}
	selected := OfKeys(step["namespace"].(string), step["prefix"].(string))
	for change, err := range r.client.Watch(ctx, int64(step["from"].(float64)), selected) {
		if err != nil {
			return nil, err
		}
		for _, key := range change.GetKeysPut().GetKeys() {
			changes = append(changes, []any{key.Key, string(key.Value)})
		}
		for _, key := range change.GetKeysDeleted().GetKeys() {
			changes = append(changes, []any{key.Key, nil})
		}
		if len(changes) >= int(step["count"].(float64)) {
			return map[string]any{"changes": changes}, nil
		}
	}
	return nil, fmt.Errorf("the watch ended after %d changes", len(changes))
}
