package streammeta

import (
	"context"
	"iter"

	v1 "streammeta.io/go/v1"
)

// Owner is a stream or a key. Its named objects are destroyed together with it.
type Owner struct {
	stream *int64
	key    *v1.OwnerKey
}

// OwnedByStream returns a stream as the owner of objects.
func OwnedByStream(id int64) Owner { return Owner{stream: &id} }

// OwnedByKey returns a key as the owner of objects.
func OwnedByKey(namespace, key string) Owner {
	return Owner{key: &v1.OwnerKey{Namespace: namespace, Key: key}}
}

// NamedUpload is a prepared object whose bytes are in the bucket, and its name.
type NamedUpload struct {
	ObjectID int64
	Name     string // 1 to 512 bytes, unique in the cluster
	Size     int64
	CRC32C   *uint32 // nil if unknown
	Owner    Owner
	Metadata Tags
}

// CommitNamedObjects names at most 1000 objects, all or none. The error has the code KEY_EXIST for a
// name in use, and KEY_NOT_EXIST or STREAM_NOT_EXIST for an owner that does not exist.
func (n *Node) CommitNamedObjects(ctx context.Context, objects ...NamedUpload) error {
	request := &v1.CommitNamedObjectsRequest{RequestId: newRequestID(), Node: n.identity}
	for _, object := range objects {
		request.Objects = append(request.Objects, &v1.NamedObjectToCommit{
			ObjectId:      &object.ObjectID,
			Name:          object.Name,
			ObjectSize:    object.Size,
			Crc32C:        object.CRC32C,
			OwnerStreamId: object.Owner.stream,
			OwnerKey:      object.Owner.key,
			Metadata:      object.Metadata.encode(),
		})
	}
	answer, err := call[v1.CommitNamedObjectsResponse](
		ctx, n.client, v1.ObjectService_CommitNamedObjects_FullMethodName, request)
	if err != nil {
		return err
	}
	for index, code := range answer.Errors {
		if err := itemError(code, "object %s", objects[index].Name); err != nil {
			return err
		}
	}
	return nil
}

// DeleteObjectsOf deletes all named objects of an owner, however many it has, in steps. With withKey
// the owner, a key, is deleted together with its last object. It reports whether the key was: a key
// without objects stays.
func (n *Node) DeleteObjectsOf(ctx context.Context, owner Owner, withKey bool) (bool, error) {
	for {
		answer, err := call[v1.DeleteNamedObjectsResponse](
			ctx, n.client, v1.ObjectService_DeleteNamedObjects_FullMethodName,
			&v1.DeleteNamedObjectsRequest{
				RequestId:     newRequestID(),
				Node:          n.identity,
				OwnerStreamId: owner.stream,
				OwnerKey:      owner.key,
				WithOwnerKey:  withKey,
			})
		if err != nil {
			return false, err
		}
		for _, code := range answer.Errors {
			if err := itemError(code, "node %d", n.ID()); err != nil {
				return false, err
			}
		}
		if answer.Remaining == 0 {
			return answer.OwnerKeyDeleted, nil
		}
	}
}

// NamedObjects yields the objects whose names begin with prefix, in name order.
func (c *Client) NamedObjects(ctx context.Context, prefix string) iter.Seq2[*v1.NamedObject, error] {
	return pages(func(token string) ([]*v1.NamedObject, string, error) {
		answer, err := call[v1.DescribeNamedObjectsResponse](
			ctx, c, v1.ObjectService_DescribeNamedObjects_FullMethodName,
			&v1.DescribeNamedObjectsRequest{
				Prefix: prefix, Page: &v1.PageRequest{PageToken: token},
			})
		if err != nil {
			return nil, "", err
		}
		return answer.Objects, answer.NextPageToken, nil
	})
}
