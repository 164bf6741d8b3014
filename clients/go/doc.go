// Package streammeta is the client of a streammeta cluster for brokers written in Go.
//
// A [Client] finds the leader, repeats calls whose repetition is safe, and explains failures. A
// [Node] speaks for one broker process: it opens streams, prepares objects and commits them. The
// messages of the contract are in package streammetav1.
//
//	client, err := streammeta.Dial([]string{"127.0.0.1:9091"})
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//
//	node, err := client.Register(ctx, 7)
//	if err != nil {
//		return err
//	}
//	ids, err := node.CreateStreams(ctx, streammeta.Tags{"topic": "orders"})
//	if err != nil {
//		return err
//	}
//	stream, err := node.OpenStream(ctx, ids[0])
//
// A call without a deadline in its context ends after the client's timeout. The outcome of a write
// that ended late is unknown: [Error.OutcomeUnknown] reports it, and a repetition is safe.
package streammeta
