package streammeta

import (
	"bytes"
	"context"
	"iter"

	v1 "streammeta.io/go/v1"
)

// Keys is a namespace of small values that brokers share.
type Keys struct {
	client    *Client
	namespace string
}

// Value is a value with its version, which grows with every change of its key.
type Value struct {
	Bytes   []byte
	Version int64
}

// Keys returns the keys of a namespace. The empty name is the default namespace.
func (c *Client) Keys(namespace string) *Keys { return &Keys{c, namespace} }

// Get returns the value of a key, nil if there is none.
func (k *Keys) Get(ctx context.Context, key string) (*Value, error) {
	answer, err := call[v1.GetKVsResponse](ctx, k.client, v1.KVService_GetKVs_FullMethodName,
		&v1.GetKVsRequest{Keys: []*v1.KVKey{{Namespace: k.namespace, Key: key}}})
	if err != nil {
		return nil, err
	}
	if result := answer.Results[0]; result.Found {
		return &Value{result.Value, result.Version}, nil
	}
	return nil, nil
}

// Put stores a value, whatever the key has now, and returns its version.
func (k *Keys) Put(ctx context.Context, key string, value []byte) (int64, error) {
	return k.put(ctx, &v1.KVToPut{Namespace: k.namespace, Key: key, Value: value, Overwrite: true})
}

// PutIfVersion stores a value if the key is at the version, 0 for absent, and returns the new
// version. The error has the code KEY_EXIST if the key is at another version.
func (k *Keys) PutIfVersion(
	ctx context.Context, key string, value []byte, version int64,
) (int64, error) {
	return k.put(ctx, &v1.KVToPut{
		Namespace: k.namespace, Key: key, Value: value, Overwrite: true, ExpectedVersion: &version,
	})
}

func (k *Keys) put(ctx context.Context, item *v1.KVToPut) (int64, error) {
	answer, attempts, err := callCounted[v1.PutKVsResponse](
		ctx, k.client, v1.KVService_PutKVs_FullMethodName,
		&v1.PutKVsRequest{RequestId: newRequestID(), Items: []*v1.KVToPut{item}})
	if err != nil {
		return 0, err
	}
	result := answer.Results[0]
	// A repetition meets the value that an earlier attempt stored.
	isOwn := attempts > 1 && result.Found && bytes.Equal(result.Value, item.Value)
	if isOwn && result.Error == v1.ErrorCode_ERROR_CODE_KEY_EXIST {
		return result.Version, nil
	}
	return result.Version, itemError(result.Error, "key %s", item.Key)
}

// Delete deletes a key. It succeeds if the key does not exist.
func (k *Keys) Delete(ctx context.Context, key string) error {
	return k.delete(ctx, &v1.KVKey{Namespace: k.namespace, Key: key})
}

// DeleteIfVersion deletes a key if it is at the version. The error has the code KEY_EXIST if it is at
// another one.
func (k *Keys) DeleteIfVersion(ctx context.Context, key string, version int64) error {
	return k.delete(ctx, &v1.KVKey{Namespace: k.namespace, Key: key, ExpectedVersion: &version})
}

func (k *Keys) delete(ctx context.Context, key *v1.KVKey) error {
	answer, err := call[v1.DeleteKVsResponse](ctx, k.client, v1.KVService_DeleteKVs_FullMethodName,
		&v1.DeleteKVsRequest{RequestId: newRequestID(), Keys: []*v1.KVKey{key}})
	if err != nil {
		return err
	}
	code := answer.Results[0].Error
	if code == v1.ErrorCode_ERROR_CODE_KEY_NOT_EXIST {
		return nil
	}
	return itemError(code, "key %s", key.Key)
}

// List yields the entries whose keys begin with prefix, in key order.
func (k *Keys) List(ctx context.Context, prefix string) iter.Seq2[*v1.KVEntry, error] {
	return pages(func(token string) ([]*v1.KVEntry, string, error) {
		answer, err := call[v1.ListKVsResponse](ctx, k.client, v1.KVService_ListKVs_FullMethodName,
			&v1.ListKVsRequest{
				Namespace: k.namespace, Prefix: prefix, Page: &v1.PageRequest{PageToken: token},
			})
		if err != nil {
			return nil, "", err
		}
		return answer.Entries, answer.NextPageToken, nil
	})
}
