package streammeta

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	v1 "streammeta.io/go/v1"
)

// authority issues certificates for the tests.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newAuthority(t *testing.T) authority {
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{certificate, key}
}

func (a authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

func (a authority) issue(t *testing.T, name string) tls.Certificate {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: name},
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestTLSIdentifiesBothSidesAndRenewsTheCertificate(t *testing.T) {
	own, foreign := newAuthority(t), newAuthority(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fake := &fakeSessions{}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{own.issue(t, "controller")},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    own.pool(),
	})))
	v1.RegisterNodeServiceServer(server, fake)
	go server.Serve(listener)
	defer server.Stop()

	heartbeat := func(options ...Option) error {
		options = append(options, WithTimeout(500*time.Millisecond))
		client, err := Dial([]string{listener.Addr().String()}, options...)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		_, err = (&Node{client, &v1.NodeIdentity{}}).Heartbeat(t.Context())
		return err
	}
	var current tls.Certificate
	renewed := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &current, nil }
	config := &tls.Config{RootCAs: own.pool(), GetClientCertificate: renewed}
	for _, name := range []string{"broker-1", "broker-1-renewed"} {
		current = own.issue(t, name)
		if err := heartbeat(WithTLS(config), WithTimeout(time.Minute)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if !slices.Equal(fake.callers, []string{"broker-1", "broker-1-renewed"}) {
		t.Fatalf("the callers are %v", fake.callers)
	}

	stranger := []tls.Certificate{foreign.issue(t, "stranger")}
	for name, options := range map[string][]Option{
		"plain text":            nil,
		"a foreign certificate": {WithTLS(&tls.Config{RootCAs: own.pool(), Certificates: stranger})},
		"no certificate":        {WithTLS(&tls.Config{RootCAs: own.pool()})},
		"a foreign controller":  {WithTLS(&tls.Config{RootCAs: foreign.pool(), GetClientCertificate: renewed})},
	} {
		if err := heartbeat(options...); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	if len(fake.beats) != 2 {
		t.Errorf("%d heartbeats, expected 2", len(fake.beats))
	}
}
