package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"os"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

const saslTopic = "sasl-go"

// authenticated produces a record as a user, and reads it as a group; prints one JSON object.
//
// Words: servers, file of the authorities, user, password. A refusal gives the name of its error.
func authenticated(words []string) {
	authorities, err := os.ReadFile(words[1])
	must(err)
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(authorities)
	client, err := kgo.NewClient(
		kgo.SeedBrokers(words[0]), kgo.DialTLSConfig(&tls.Config{RootCAs: trusted}),
		kgo.SASL(plain.Auth{User: words[2], Pass: words[3]}.AsMechanism()),
		kgo.AllowAutoTopicCreation(), kgo.ConsumerGroup(saslTopic), kgo.ConsumeTopics(saslTopic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	must(err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := client.Ping(ctx); err != nil {
		must(json.NewEncoder(os.Stdout).Encode(map[string]string{"error": nameOf(err)}))
		return
	}
	record := &kgo.Record{Topic: saslTopic, Value: []byte("value")}
	must(client.ProduceSync(ctx, record).FirstErr())
	var read []string
	for len(read) == 0 && ctx.Err() == nil {
		client.PollFetches(ctx).EachRecord(func(one *kgo.Record) {
			read = append(read, string(one.Value))
		})
	}
	must(json.NewEncoder(os.Stdout).Encode(map[string]any{"left": 0, "read": read}))
}
